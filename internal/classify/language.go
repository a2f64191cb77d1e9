package classify

// Languages told apart by their commonest words.
var langNames = [...]string{"en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "no", "fi", "pl", "cs", "hu", "ro", "hr", "tr", "id", "vi", "et", "lt", "lv", "sk", "ru", "uk", "bg", "sr"}

const langCount = 27

func langCyrillic(i int) bool { return i >= 23 }

var langWords = [langCount]string{
	"the of and to in is that for it with as was on are this be you not what have from or by an at how i can my which their will would your do does if about please has who when why more than all one we he she they but no so there me make write give find",
	"der die und das ist nicht ein eine zu mit den von für auf dem sich auch es ich sie wir ihr wie was werden wird bei nach aus oder aber kann haben sind im dass mein bitte einen einer wenn nur noch über",
	"le la les de et un une des est pour que dans en du au pas vous nous je il elle avec sur ce qui plus par sont mon comment pourquoi mais ou où cette être ont quel quelle c'est à moi ses leur",
	"el la los las de y que en un una es por con para no se del al su lo como más pero mi qué cómo está son sus este esta tiene cuando muy porque donde ser hay también desde puede",
	"il lo la gli le di e che un una è per con non sono del della nel come più ma mi si da al dei questo questa cosa perché anche quando quale ha hai ho nella delle degli alla",
	"o a os as de e que um uma é por com para não se do da no na em mais mas como meu minha você qual são está foi ao dos das pelo pela isso esta este quando porque também",
	"de het een en van is dat niet in op voor met zijn ik je te aan er maar wat hoe die ook naar om deze dit wordt bij als uit nog kan mijn hebben heeft wij waar waarom",
	"och att det är en ett som på för med av den inte jag du han vi har till om men kan var från hur vad eller ska min mitt denna detta så när vilka där också",
	"og at det er en et som på for med af den ikke jeg du han vi har til om men kan var fra hvordan hvad eller skal min mit denne dette så når hvilke der også blev",
	"og at det er en et som på for med av den ikke jeg du han vi har til om men kan var fra hvordan hva eller skal min mitt denne dette så når hvilke der også ble",
	"ja on ei se että en hän oli ovat mutta kun niin olen joka mikä miten tai voi mitä kuin sen minun tämä tässä ole olla nyt vain myös miksi jos",
	"i w nie na się z jest do to że jak co o po ale za od są tak czy jego przez może dla który która mój moje przed tym tego ten oraz było jestem proszę dlaczego",
	"a je se na že to v s z do jak ale jsem co by za od jako pro po jeho nebo který která může být není si ve k o tak jsou proč můj moje prosím",
	"a az és hogy nem is egy van de ha meg mint csak el ez mi már volt kell én te vagy hogyan mit ezt azt lehet minden nagyon miért kérem",
	"și de la în a nu cu pe că este un o să mai din pentru care au sunt ce cum dar am fi sau ca prin lui ei acest această foarte unde",
	"i je u se na da su za od s što kao ne koji koja ali sam bi ili to iz nije kako biti ima može samo što jer moj moja gdje zašto",
	"ve bir bu için ile da de ne mi var çok ama ben sen o nasıl olarak daha gibi kadar değil olan benim ya her en neden lütfen ise",
	"dan yang di ini itu dengan untuk dari tidak pada ke saya akan adalah ada bisa atau juga oleh sudah karena anda apa bagaimana dalam kami mereka lebih",
	"và của là có không được cho một trong những các này với để người khi đã tôi bạn như về ra làm nào thì đến từ cũng gì",
	"ja on ei et see kui ka oli ta mis aga ning või mida kes nad sest oma selle minu kuidas olla siis veel miks palun",
	"ir yra kad į su iš ne tai kaip bet jis buvo aš ar apie po už dėl ji mano kas kur labai gali bei jau prašau kodėl",
	"un ir ka ar uz no par es tas kas bet kā vai to viņš bija mans ja lai pie pēc nav var kur ļoti lūdzu kāpēc",
	"a je sa na že to v s z do ako ale som čo by za od pre po jeho alebo ktorý ktorá môže byť nie si vo k o tak sú prečo môj moje prosím",
	"и в не на что с я как это по но он она к из у за от о то же все так вы бы для мы мой его или если когда есть почему чтобы",
	"і в не на що з я як це по але він вона до із у за від о то ж все так ви б для ми мій його або якщо коли є чому щоб та",
	"и в не на че с аз как това по но той тя към из у за от о то се всички така вие би за ние мой неговият или ако когато е защо да са",
	"и у не на што с ја како ово по али он она ка из за од о то се све тако ви би ми мој његов или ако када је зашто да су",
}

// addLanguages gives the commonest words their languages.
func (l *lexicon) addLanguages() {
	masks := map[uint32]uint32{}
	for i, list := range langWords {
		start := 0
		for k := 0; k <= len(list); k++ {
			if k == len(list) || list[k] == ' ' {
				if k > start {
					masks[hashWord(list[start:k])] |= 1 << i
				}
				start = k + 1
			}
		}
	}
	index := map[uint32]uint8{}
	l.langs = []uint32{0}
	for h, m := range masks {
		k, ok := index[m]
		if !ok {
			if len(l.langs) == 255 {
				continue
			}
			k = uint8(len(l.langs))
			index[m] = k
			l.langs = append(l.langs, m)
		}
		l.put(h).lang = k
	}
}
